"""What all experiments share: prompts and answers, splits, intervals, the result schema, claims and their wording."""
