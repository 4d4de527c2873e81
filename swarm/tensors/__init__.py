"""Tensors on the wire and in flat vectors: framing, codecs, schemas, partitions. I/O-free but for `streaming`."""
