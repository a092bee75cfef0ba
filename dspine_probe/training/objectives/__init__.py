"""What each kind of draft is trained to do: one file a kind, named by its entry in `drafts.registry`."""
