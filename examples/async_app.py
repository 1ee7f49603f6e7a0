"""An async application: `await session.enqueue()`, and a handler that is a coroutine.

    python examples/async_app.py

The sessions come from SQLAlchemy's own `async_sessionmaker`, with `AsyncTaskSession` for a class.
The driver is psycopg; with "postgresql+asyncpg://" the application would do the same over asyncpg.
The worker always brings psycopg, whatever the application uses.

Async handlers all run on one event loop, many at a time, which suits tasks that wait for others:
mail servers, web services, large language models. A handler that computes should be a plain
function: those run in threads, and cannot hold the loop up. A worker takes both kinds at once.

Tables: the library's own, `Task` and `DeadTask`, beside one table of the application.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date

from sqlalchemy import BigInteger, Identity, select
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import AsyncTaskSession, Task, TaskRegistry, Worker


class Base(DeclarativeBase):
    pass


class Trip(Base):
    __tablename__ = "example_trip"

    trip_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    city: Mapped[str]
    day: Mapped[date]
    forecast: Mapped[str | None]


@dataclass(frozen=True)
class Forecast:
    """The params. A date is nothing that JSON knows; it arrives as a date all the same."""

    trip_id: int
    day: date


tasks = TaskRegistry()


@tasks.handler("FETCH_FORECAST", max_attempts=5, timeout=30)
async def fetch_forecast(session: AsyncTaskSession, params: Forecast) -> None:
    trip = await session.get_one(Trip, params.trip_id)
    weather = await ask_weather_service(trip.city, params.day)
    trip.forecast = weather  # no commit: the worker does it, and the task is gone with it


async def ask_weather_service(city: str, day: date) -> str:
    await asyncio.sleep(0)  # a web request, in real life
    return f"{city} on {day:%d %B}: sunny"


async def plan_trips(engine: AsyncEngine, *cities: str) -> list[int]:
    """Write trips and their tasks in one transaction; return the ids of the trips."""
    make_session = async_sessionmaker(engine, class_=AsyncTaskSession, expire_on_commit=False)
    trips = [Trip(city=city, day=date(2030, 5, 1)) for city in cities]
    async with make_session.begin() as session:
        session.add_all(trips)
        await session.flush()  # the trips need their ids
        for trip in trips:
            await session.enqueue(fetch_forecast, Forecast(trip_id=trip.trip_id, day=trip.day))
    return [trip.trip_id for trip in trips]


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Task.metadata.create_all)
        await connection.run_sync(Base.metadata.create_all)


async def serve(database_url: str) -> list[int]:
    """Do what the application does: all of it on one event loop."""
    engine = create_async_engine(database_url)
    await create_tables(engine)
    trip_ids = await plan_trips(engine, "Lisbon", "Oslo")
    await engine.dispose()
    return trip_ids


async def read_forecasts(database_url: str, trip_ids: list[int]) -> list[str | None]:
    engine = create_async_engine(database_url)
    wanted = select(Trip.forecast).where(Trip.trip_id.in_(trip_ids)).order_by(Trip.trip_id)
    async with engine.connect() as connection:
        forecasts = list(await connection.scalars(wanted))
    await engine.dispose()
    return forecasts


def main(database_url: str) -> None:
    trip_ids = asyncio.run(serve(database_url))
    print(f"planned {len(trip_ids)} trips")
    # In real life a process of its own: python -m pgtask_sa.worker async_app:tasks
    Worker(tasks, database_url, concurrency=2, drain=True).run()
    for forecast in asyncio.run(read_forecasts(database_url, trip_ids)):
        print(forecast)


if __name__ == "__main__":
    from database import database

    with database() as url:
        main(url)
