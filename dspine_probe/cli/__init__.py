"""The command line: `main` holds the program, each other module one group of commands or what they share."""
