"""Conversions between plain values and protobuf, and files of messages."""
