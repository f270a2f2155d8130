"""What server and agent share: the model, its digests, and the wire."""
