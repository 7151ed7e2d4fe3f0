"""A fake engine process without torch, which sends few messages. Tests of `EngineClient` run it.

On a CPU it is ready and answers each request with an empty step; on any other device it cannot start.
"""

import socket
import sys
from collections.abc import Iterator

from tests.engine.builders import make_facts

from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.messages import Add, LoadModel, Ready, StartFailed, StepOutputs, ToEngine, to_engine_decoder
from conveyor_engine.wire.request import EngineStats


def messages(connection: socket.socket) -> Iterator[ToEngine]:
    frames = FrameReader()
    while data := connection.recv(1 << 16):
        for payload in frames.feed(data):
            yield to_engine_decoder.decode(payload)


def talk(connection: socket.socket) -> None:
    for message in messages(connection):
        match message:
            case LoadModel(config) if config.device != "cpu":
                return connection.sendall(encode_frame(StartFailed("NoDevice", "no such device")))
            case LoadModel():
                connection.sendall(encode_frame(Ready(make_facts(), 0.0)))
            case Add():
                connection.sendall(encode_frame(StepOutputs([], EngineStats(), 1)))
    return None


if __name__ == "__main__":
    talk(socket.socket(fileno=int(sys.argv[2])))  # --fd N
