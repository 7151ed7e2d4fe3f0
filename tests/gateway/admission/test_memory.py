"""Which bytes have room, and which holding gives way."""

from conveyor_gateway.admission.memory import Holding, Memory


class Upload:
    """A body that is still arriving."""

    def __init__(self, memory: Memory, service: str, client: str, size_bytes: int) -> None:
        self.stopped = False
        self.holding = Holding(memory, service, client)
        self._arriving = self.holding.arriving(self.stop)
        self._arriving.__enter__()
        self.was_taken = self.holding.take(size_bytes)

    def stop(self) -> None:
        self.stopped = True


def test_one_service_has_half_and_one_client_seven_eighths() -> None:
    memory = Memory(800)
    assert Holding(memory, "a/one", "10.0.0.1").take(400)
    assert not Holding(memory, "a/one", "10.0.0.2").take(1)
    assert Holding(memory, "a/two", "10.0.0.1").take(300)
    assert not Holding(memory, "a/three", "10.0.0.1").take(1)
    assert Holding(memory, "a/three", "10.0.0.2").take(100)
    assert not Holding(memory, "a/four", "10.0.0.3").take(1)


def test_the_client_that_holds_most_in_arriving_bodies_loses_its_first() -> None:
    memory = Memory(800)
    small = Upload(memory, "a/one", "10.0.0.1", 50)
    large = [Upload(memory, service, "10.0.0.2", 350) for service in ("a/one", "a/two")]
    assert Upload(memory, "a/three", "10.0.0.3", 60).was_taken
    assert [each.stopped for each in (small, *large)] == [False, True, False]
    assert memory.held_bytes == 50 + 350 + 60
    assert not large[0].holding.take(1), "what was given up gets no more"


def test_where_one_service_is_full_only_its_own_arriving_bodies_give_way() -> None:
    memory = Memory(800)
    other = Upload(memory, "a/two", "10.0.0.2", 300)
    own = Upload(memory, "a/one", "10.0.0.1", 200)
    waiting = Holding(memory, "a/one", "10.0.0.1")
    assert waiting.take(200)
    assert Upload(memory, "a/one", "10.0.0.3", 150).was_taken
    assert (other.stopped, own.stopped) == (False, True)


def test_whoever_asks_is_refused_when_it_is_the_one_to_give_way() -> None:
    memory = Memory(800)
    assert Holding(memory, "a/one", "10.0.0.1").take(390)
    asking = Upload(memory, "a/one", "10.0.0.1", 10)
    assert not asking.holding.take(1)
    assert not asking.stopped


def test_all_is_given_back_at_the_end() -> None:
    memory = Memory(800)
    with Holding(memory, "", "10.0.0.1") as holding:
        assert holding.take(300)
        holding.assign("a/one", 200)
        assert memory.held_bytes == 200
    assert memory.held_bytes == 0
    assert Holding(memory, "a/one", "10.0.0.1").take(400)
