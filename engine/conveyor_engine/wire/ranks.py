"""Messages from the engine process to the other ranks of its model.

`frames` sends them on one stream socket for each rank. Used by `execution.ranks` and `execution.rank_process`. A rank
replies only to report why it ends. It sends no results, because rank 0 computes the same ones.
"""

import msgspec

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.wire.step import RowMask, StepPlan
from conveyor_protocol.failure_reasons import FailureReason


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class LoadRank(_Message):
    """The first message: load this rank's part of the model. The ranks find each other through the file `meeting`."""

    config: EngineConfig
    rank: int
    meeting: str


class BeginStep(_Message):
    """Begin this step."""

    plan: StepPlan


class SampleStep(_Message):
    """Sample the tokens of the step that has begun, among those that the masks allow."""

    masks: list[RowMask]


class RankFailed(_Message):
    """The last message of a rank: why it ends."""

    reason: FailureReason
    message: str


ToRank = LoadRank | BeginStep | SampleStep
to_rank_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank_decoder: msgspec.msgpack.Decoder[RankFailed] = msgspec.msgpack.Decoder(RankFailed)
