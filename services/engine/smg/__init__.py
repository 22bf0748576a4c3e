"""The service `VllmEngine`, by which the router smg sends requests to an engine and follows its cache and load.

smg tokenizes, renders chats and detokenizes itself. Its messages come from the package smg-grpc-proto of the extra
`routers`; only `serving` may be imported without it.
"""
