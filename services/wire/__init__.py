"""Conversions between plain values and protobuf: both directions of a message in one module."""
