"""Training of drafts: corpora, cached features, anchors, losses, the loop."""
