"""A pool of models loads models for requests within its budget, unloads idle ones, and never one that is in
use."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.llm.model_pool import ModelPool, PooledModel
from streamserve.llm.residency import Idle, to_unload
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError


@dataclass
class FakeModel:
    """A model that takes a few turns of the event loop to load, and may fail."""

    error: Exception | None = None
    fails: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: bool = False

    async def start(self) -> None:
        await asyncio.sleep(0.002)
        if self.error:
            raise self.error
        self.loaded = True

    async def unload(self) -> None:
        self.loaded = False
        await asyncio.sleep(0.001)

    async def until_failed(self) -> None:
        await self.fails.wait()
        raise FleetError("failed")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def pool_of(
    *sizes: int, budget: int, idle: float | None = None, memory_timeout: float = 5.0, max_waiting: int = 100
) -> tuple[ModelPool, list[FakeModel]]:
    """Return a pool of models named 0, 1, … of these sizes."""
    fakes = [FakeModel() for _ in sizes]
    models = [PooledModel(str(n), fakes[n], size, idle) for n, size in enumerate(sizes)]
    return ModelPool(models, budget, 20.0, memory_timeout, max_waiting), fakes


def states(pool: ModelPool) -> str:
    return " ".join(model.state for model in pool.models.values())


def test_the_least_recently_used_model_is_unloaded_for_another() -> None:
    async def test() -> None:
        pool, fakes = pool_of(5, 5, 5, budget=10)
        for name in ("0", "1", "0"):
            await pool.acquire(name)
            pool.release(name)
        await pool.acquire("2")
        assert states(pool) == "loaded not loaded loaded"
        assert [fake.loaded for fake in fakes] == [True, False, True]
        assert [model.loads for model in pool.models.values()] == [1, 1, 1]
        assert pool.models["1"].unloads == 1
        pool.release("2")
        await pool.close()
        assert not any(fake.loaded for fake in fakes)

    run(test)


def test_a_model_in_use_is_never_unloaded_and_the_refusal_names_it() -> None:
    async def test() -> None:
        pool, _ = pool_of(5, 5, budget=5, memory_timeout=0.01)
        await pool.acquire("0")
        with pytest.raises(RequestError, match=r"'1' is not loaded: .* in use .*: 0$") as refused:
            await pool.acquire("1")
        assert (refused.value.status, refused.value.retry_after) == (503, 5.0)
        assert states(pool) == "loaded not loaded"
        waiting = asyncio.create_task(pool.acquire("1", patient=True))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        pool.release("0")
        await waiting
        assert states(pool) == "not loaded loaded"
        await pool.close()

    run(test)


def test_an_idle_model_is_unloaded_and_loaded_again() -> None:
    async def test() -> None:
        pool, _ = pool_of(5, budget=5, idle=0.02)
        for loads in (1, 2):
            await pool.acquire("0")
            await asyncio.sleep(0.06)
            assert states(pool) == "loaded"
            pool.release("0")
            await asyncio.sleep(0.1)
            assert states(pool) == "not loaded"
            assert pool.models["0"].loads == loads
        await pool.close()

    run(test)


def test_a_model_is_unloaded_when_asked_unless_it_is_in_use() -> None:
    async def test() -> None:
        pool, fakes = pool_of(5, 5, budget=10)
        loading = asyncio.create_task(pool.acquire("0"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"'0' is being loaded") as refused:
            pool.unload("0")
        assert refused.value.status == 409
        await loading
        with pytest.raises(RequestError, match=r"'0' is in use: open .* streams: 1$"):
            pool.unload("0")
        assert fakes[0].loaded
        pool.release("0")
        pool.unload("0")
        assert states(pool) == "unloading not loaded"
        pool.unload("0")
        again = asyncio.create_task(pool.acquire("0"))
        await again
        assert (pool.models["0"].loads, pool.models["0"].unloads, fakes[0].loaded) == (2, 1, True)
        pool.unload("1")
        assert states(pool) == "loaded not loaded"
        pool.release("0")
        await pool.close()

    run(test)


def test_a_failed_load_refuses_its_requests_and_leaves_the_others() -> None:
    async def test() -> None:
        pool, fakes = pool_of(5, 5, budget=5)
        fakes[0].error = CheckpointError("no weights")
        for _ in range(2):
            with pytest.raises(RequestError, match="'0' cannot be loaded: no weights") as refused:
                await pool.acquire("0")
            assert refused.value.status == 503
        with pytest.raises(CheckpointError, match="no weights"):
            await pool.load("0")
        assert pool.models["0"].loads == 0
        await pool.acquire("1")
        assert states(pool) == "not loaded loaded"
        await pool.close()

    run(test)


def test_waiting_requests_are_bounded_and_refused_at_the_end() -> None:
    async def test() -> None:
        pool, _ = pool_of(5, 5, budget=5, max_waiting=2)
        await pool.acquire("0")
        waiting = [asyncio.create_task(pool.acquire("1")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="2 requests wait for the model '1'") as refused:
            await pool.acquire("1")
        assert refused.value.status == 429
        await pool.close()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RequestError)
            assert "shutting down" in result.message

    run(test)


def test_a_model_that_fails_for_good_ends_the_server() -> None:
    async def test() -> None:
        pool, fakes = pool_of(5, budget=5)
        failing = asyncio.create_task(pool.until_failed())
        await pool.load("0")
        fakes[0].fails.set()
        with pytest.raises(FleetError):
            await failing
        await pool.close()

    run(test)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 10), min_size=2, max_size=5), st.integers(0, 10))
def test_random_requests_keep_the_budget_and_their_models(seed: int, sizes: list[int], spare: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        pool, fakes = pool_of(*sizes, budget=max(sizes) + spare)
        served = 0

        async def request() -> None:
            nonlocal served
            name = rng.randrange(len(sizes))
            await pool.acquire(str(name), patient=True)
            try:
                for _ in range(rng.randrange(3)):
                    assert fakes[name].loaded
                    assert pool.used <= pool.budget
                    await asyncio.sleep(0)
            finally:
                pool.release(str(name))
            served += 1

        tasks = [asyncio.create_task(request()) for _ in range(20)]
        gone = rng.sample(tasks, 3)
        await asyncio.sleep(rng.random() * 0.01)
        for task in gone:
            task.cancel()
        await asyncio.gather(*(task for task in tasks if task not in gone))
        await asyncio.gather(*gone, return_exceptions=True)
        assert served >= 17
        assert not any(model.users for model in pool.models.values())
        assert not any(model.waiting for model in pool.models.values())
        await pool.close()
        assert not any(fake.loaded for fake in fakes)

    run(test)


IDLE = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 100)), max_size=6)


@given(st.integers(-5, 60), IDLE)
def test_the_models_to_unload_are_enough_and_none_of_them_is_unnecessary(
    needed: int, models: list[tuple[int, int]]
) -> None:
    idle = [Idle(str(n), size, used) for n, (size, used) in enumerate(models)]
    chosen = to_unload(needed, idle)
    if chosen is None:
        assert sum(each.size for each in idle) < needed
        return
    freed = sum(each.size for each in chosen)
    assert freed >= needed
    assert all(freed - each.size < needed for each in chosen)
    if chosen:
        newest = max(each.last_used for each in chosen)
        assert sum(each.size for each in idle if each.last_used < newest) < needed
