"""`python -m dspine_probe.cli`, for `accelerate launch -m`."""

from dspine_probe.cli.main import main

main()
