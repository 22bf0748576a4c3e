"""A network of gRPC connections in memory: real messages and handlers, virtual delays, and cuts.

It has the part of grpc.aio that the services use, with the same order of events: messages of a stream arrive in order,
those of different streams in any order. Where a connection breaks, the messages under way are lost. The client's
call then fails with UNAVAILABLE. The server's handler first reads the end of the requests, as if they were
half-closed, and is cancelled a moment later.
"""
