"""Tests the pools of the states that layers keep for each row, and their copies."""

import torch

from conveyor_engine.execution.states import StateKey, States, StateShape

CPU = torch.device("cpu")


def make_states() -> States:
    """Make states of two convolutions and of three recurrences, two of which have one shape."""
    shapes = {StateKey(layer, "conv", 0): StateShape((4, 2), torch.bfloat16) for layer in (0, 3)}
    for layer, size in ((0, 3), (2, 5), (3, 3)):
        shapes[StateKey(layer, "recurrent", 0)] = StateShape((2, size, size), torch.float32)
    states = States.allocate(shapes, 5, CPU, num_saved=3)
    for pool in states.pools.values():
        pool.copy_(torch.randn(pool.shape))
    return states


def test_rows_get_their_copies_back() -> None:
    torch.manual_seed(0)
    states = make_states()
    before = {key: pool.clone() for key, pool in states.pools.items()}
    states.save([4, 0])
    for pool in states.pools.values():
        pool.zero_()
    states.restore([(1, 0), (0, 4)])
    for key, pool in states.pools.items():
        assert torch.equal(pool[[0, 4]], before[key][[0, 4]])
        assert not pool[[1, 2, 3]].any()


def test_each_layer_has_a_pool_as_the_kernels_expect_it() -> None:
    """The channels of a convolution lie side by side, and the pools of two layers share no memory."""
    pools = make_states().pools
    assert all(
        (pool.transpose(1, 2) if key.kind == "conv" else pool).is_contiguous() and len(pool) == 5
        for key, pool in pools.items()
    )
    before = {key: pool.clone() for key, pool in pools.items()}
    changed = StateKey(0, "recurrent", 0)
    pools[changed].zero_()
    assert [key for key, pool in pools.items() if not torch.equal(pool, before[key])] == [changed]
