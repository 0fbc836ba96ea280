"""Pictures of masks and plans with matplotlib, which is an optional extra."""
