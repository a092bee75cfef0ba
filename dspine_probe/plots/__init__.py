"""Pure functions from an experiment's result to a plotly figure."""
