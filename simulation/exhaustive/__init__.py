"""Small universes, exhaustively: all orders of what can happen, by the same code, up to a depth.

The universe has a KV manager, two incarnations of one engine with three device blocks and one host block, and two
requests for each incarnation. What happens next is a choice: a message arrives, which may be the next one of any
direction of any call; an engine's thread makes a turn, or its loop runs its callbacks; a process goes on after a short
pause; the newer engine starts. Where nothing else can happen, time passes to the next timer. Faults are choices too: a
connection is cut, a process is killed (a KV manager is started again), or time passes although something else could
happen, so that a message or a process is late.

After each choice, the process runs callbacks until none is left. This loses no order of messages: processes share
nothing but the network and the time, and their callbacks run in the order of asyncio. An engine's thread and its loop
are chosen separately.

Equal states are merged. A state is what each process is about to do, and the messages under way: see `structure` for
the first, `state` for what can happen, `effects` for how it is computed.
"""
