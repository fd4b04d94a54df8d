"""From text to tokens on disk, and from there to batches."""
