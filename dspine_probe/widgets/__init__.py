"""Live views for notebooks, made of ipywidgets and plotly; each has a still figure that says the same without them."""
