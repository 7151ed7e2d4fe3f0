"""The messages between the engine process and the processes for grammars. `wire.frames` sends them.

A ticket is the number of a state of an answer: it is new for each token. Tickets are never used again.
"""

import msgspec

from conveyor_engine.wire.frames import encode_frame


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Try(_Message):
    """To the fork server: compile this grammar in a process with limits, and compute its first mask."""

    number: int
    grammar: str


class Cancel(_Message):
    """To the fork server: nobody waits for this grammar any more."""

    number: int


class Tried(_Message):
    """From the fork server: the result. `problem` is empty if the grammar stays within its limits."""

    number: int
    problem: str
    is_too_costly: bool
    num_bytes: int  # memory that the compiled grammar takes


class Result(_Message):
    """From a trial to the fork server: the problem, empty if there is none, and the memory that the grammar takes."""

    problem: str
    num_bytes: int
    retires: bool  # this process takes no further grammar


class Loaded(_Message):
    """From the fork server: it has read the tokenizer. `problem` says why it could not."""

    problem: str


class Compile(_Message):
    """To the walker: compile this grammar, which has been tried. It takes `num_bytes` of memory."""

    number: int
    grammar: str
    num_bytes: int


class Compiled(_Message):
    """From the walker."""

    number: int


class Open(_Message):
    """To the walker: begin an answer in this slot, continue it by these tokens, and build its mask."""

    slot: int
    ticket: int
    grammar: str
    tokens: list[int]


class Accept(_Message):
    """To the walker: append a token to each of these answers, and build their masks."""

    tokens: list[tuple[int, int, int]]  # slot, ticket of the new state, token


class Close(_Message):
    """To the walker: forget the answer in this slot."""

    slot: int


class Broke(_Message):
    """From the walker: the answer cannot be continued."""

    slot: int
    ticket: int
    problem: str
    is_too_costly: bool


class Started(_Message):
    """From the walker: its first message."""

    pid: int


class Wake(_Message):
    """From the walker: a mask is ready, and the engine's loop waits for one."""


ToWalker = Compile | Open | Accept | Close
FromWalker = Started | Compiled | Broke | Wake
FromServer = Loaded | Tried
ToServer = Try | Cancel
result_decoder = msgspec.msgpack.Decoder(Result)
to_server_decoder = msgspec.msgpack.Decoder(ToServer)
to_walker_decoder = msgspec.msgpack.Decoder(ToWalker)
from_walker_decoder = msgspec.msgpack.Decoder(FromWalker)
from_server_decoder = msgspec.msgpack.Decoder(FromServer)
encode = encode_frame
