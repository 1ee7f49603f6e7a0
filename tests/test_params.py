"""What may travel in params, and what is refused, with the path of the bad value."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
import time
import uuid
from collections import OrderedDict
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NewType
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import cast, create_engine, literal, select
from sqlalchemy.dialects.postgresql import JSONB
from typing_extensions import TypedDict  # pydantic does not take that of typing before 3.12

from pgtask_sa import ParamsError
from pgtask_sa.codec import codec_for
from pgtask_sa.errors import HandlerError
from pgtask_sa.params import hstore_texts, snapshot, snapshot_hstore


class Color(enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


class Strange(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Address:
    city: str
    since: dt.date


@dataclasses.dataclass
class Welcome:
    usr_id: uuid.UUID
    at: dt.datetime
    amount: Decimal
    color: Color
    address: Address
    tags: tuple[str, ...] = ()
    wait: dt.timedelta = dt.timedelta(seconds=90)


class WelcomeModel(pydantic.BaseModel):
    usr_id: uuid.UUID
    colors: set[Color] = set()
    address: Address | None = None


class WelcomeDict(TypedDict):
    usr_id: uuid.UUID
    at: dt.datetime


UsrId = NewType("UsrId", int)


class Ordered(TypedDict):
    usr_id: UsrId


WELCOME = Welcome(
    uuid.UUID(int=7),
    dt.datetime(2026, 11, 1, 1, 30, tzinfo=ZoneInfo("America/New_York"), fold=1),
    Decimal("0.10"),
    Color.RED,
    Address("Bergen", dt.date(2026, 2, 28)),
    ("a", "b"),
)


@pytest.fixture(scope="module")
def through_jsonb(server_url: str):
    """Give a function that sends a value to a jsonb on the server and back."""
    with create_engine(server_url).connect() as connection:
        yield lambda value: connection.scalar(select(cast(literal(value, JSONB), JSONB)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": ["x", "y\x00"]}}, "params.a.b[1]: text with a NUL character"),
        ({"a": {"b\x00": 1}}, "params.a['b\\x00']: text with a NUL character"),
        ({"a": "\ud800"}, "params.a: text with a lone surrogate"),
        ({"\udfff": 1}, "params['\\udfff']: text with a lone surrogate"),
        ({"a": math.nan}, "params.a: nan is not JSON"),
        ({"a": [-math.inf]}, "params.a[0]: -inf is not JSON"),
        ({"a": 1e23}, "params.a: float 1e+23 would come back as another number"),
        ({"a": {1: 2}}, "params.a: keys must be str, got 1 (int)"),
        ({None: 2}, "params: keys must be str, got None (NoneType)"),
        ({"a b": [{"c": 10**5000}]}, "params['a b'][0].c: integer with more than 4200 digits"),
        ([1], "params: must be a dict, got list"),
        ("text", "params: must be a dict, got str"),
    ],
)
def test_what_postgres_cannot_keep_is_refused_with_its_path(value: Any, message: str) -> None:
    """NUL, surrogates, NaN, changed floats and odd keys are errors that say where."""
    with pytest.raises(ParamsError) as caught:
        snapshot(value)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        {1},
        b"x",
        uuid.uuid4(),
        dt.date.today(),
        Decimal(1),
        Color.RED,
        Strange.ONE,
        object(),
    ],
)
def test_other_types_are_refused_and_the_error_names_the_way_out(value: Any) -> None:
    """What is not plain JSON needs a typed handler, and the message says so."""
    with pytest.raises(ParamsError, match="is not plain JSON; annotate the handler's params") as e:
        snapshot({"a": [{"b": value}]})

    assert e.value.path == "params.a[0].b"


def test_params_are_copied_deeply() -> None:
    """Changing the dict after the call changes nothing (C14)."""
    given = {"a": [1, {"b": 2}]}

    kept = snapshot(given)
    given["a"][1]["b"] = 3

    assert kept == {"a": [1, {"b": 2}]}


def test_no_params_are_an_empty_object() -> None:
    """None has one canonical form (D8)."""
    assert snapshot(None) == {}


def test_heirs_of_plain_types_become_plain() -> None:
    """An OrderedDict, a read-only view or a str subclass is kept as what it equals."""
    kept = snapshot(MappingProxyType({"a": OrderedDict(b=Text("c"))}))

    assert kept == {"a": {"b": "c"}}
    assert [type(kept["a"]), type(kept["a"]["b"])] == [dict, str]


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x" * 1_000_001},
        {"a": ["x" * 1000] * 1001},
        {"a": [1.5] * 300_000},
        {"a": [[0] * 1000] * 1000},
        {f"key{i}": None for i in range(120_000)},
        {"a": "æ" * 500_001},
    ],
    ids=["text", "list", "numbers", "shared", "keys", "utf-8"],
)
def test_big_params_are_refused(value: Any) -> None:
    """More than a megabyte of JSON is an error, whatever it is made of (D6)."""
    with pytest.raises(ParamsError, match="over the limit of 1,000,000 bytes"):
        snapshot(value)


def test_nearly_a_megabyte_is_kept() -> None:
    """The limit does not bite early."""
    assert len(snapshot({"a": "x" * 999_900})["a"]) == 999_900


def test_deep_and_circular_params_are_refused() -> None:
    """Nesting ends at a bound well below Python's and Postgres's own (D6)."""
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    circular: dict[str, Any] = {}
    circular["a"] = [circular, circular]

    for value in (deep, circular):
        with pytest.raises(ParamsError, match="nested deeper than 200 levels"):
            snapshot(value)


def test_a_structure_that_shares_its_parts_ends_soon() -> None:
    """Forty doublings are 2^40 leaves; the size limit stops the walk long before."""
    shared: list[Any] = ["x"]
    for _ in range(40):
        shared = [shared, shared]
    start = time.perf_counter()

    with pytest.raises(ParamsError, match="over the limit"):
        snapshot({"a": shared})

    assert time.perf_counter() - start < 5


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats()
    | st.floats(min_value=1e15, max_value=1e300)
    | st.text(st.characters(codec=None, exclude_categories=[]), max_size=8)
    | st.sampled_from(["\x00", "\ud800", "\\u0000", "æøå", "😀", '"', "\\"])
    | st.tuples(st.integers())
    | st.binary(max_size=3),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 3), children, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=st.dictionaries(st.text(max_size=4), JSONISH, max_size=4))
def test_params_come_back_equal_or_are_refused(through_jsonb, value: dict[str, Any]) -> None:
    """Whatever snapshot() lets pass, jsonb gives back unchanged (D1, D2, D3)."""
    try:
        kept = snapshot(value)
    except ParamsError:
        return
    came_back = through_jsonb(kept)

    assert came_back == value
    assert _types(came_back) == _types(value)


def _types(value: Any) -> Any:
    """Return the shape by kinds, numbers of any kind being one: 1e16 comes back as an int."""
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return "number" if type(value) in (int, float) else type(value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Welcome, WELCOME),
        (WelcomeModel, WelcomeModel(usr_id=uuid.UUID(int=1), colors={Color.RED})),
        (WelcomeDict, {"usr_id": uuid.UUID(int=2), "at": dt.datetime.now(dt.timezone.utc)}),
        (Ordered, {"usr_id": 3}),
        (dict[str, Decimal], {"a": Decimal("1.50")}),
        (dict[int, dt.date], {3: dt.date(2026, 1, 1)}),
    ],
    ids=["dataclass", "model", "typeddict", "newtype", "decimals", "int keys"],
)
def test_typed_params_come_back_as_themselves(through_jsonb, annotation: Any, value: Any) -> None:
    """UUID, datetime, Decimal, Enum, date and nested types survive the trip through jsonb."""
    codec = codec_for(annotation)

    came_back = codec.load(through_jsonb(codec.dump(value)))

    if annotation is Welcome:  # in the repeated hour two zones never compare equal in Python
        assert came_back.at.timestamp() == value.at.timestamp()
        came_back.at = value.at
    assert came_back == value
    assert type(came_back) is type(value)


def test_a_mapping_is_accepted_where_it_validates() -> None:
    """A dict stands in for the typed params, and is stored in their JSON form."""
    raw = codec_for(WelcomeModel).dump({"usr_id": str(uuid.UUID(int=1)), "colors": ["red"]})

    assert raw == {"usr_id": str(uuid.UUID(int=1)), "colors": ["red"], "address": None}


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (WelcomeModel, {"usr_id": "nonsense"}, "params.usr_id"),
        (WelcomeModel, {}, "params.usr_id"),
        (WelcomeModel, Address("x", dt.date.today()), "params"),
        (Welcome, dataclasses.replace(WELCOME, address=Address(3, "x")), "params.address.city"),
        (Welcome, dataclasses.replace(WELCOME, tags=("a", "b\x00")), "params.tags[1]"),
        (dict[str, float], {"a": math.nan}, "params.a"),
        (WelcomeDict, None, "params.usr_id"),
    ],
)
def test_wrong_typed_params_are_refused_at_the_call(annotation: Any, value: Any, path: str) -> None:
    """Also an instance that was built with wrong fields: nobody validated it before."""
    with pytest.raises(ParamsError) as caught:
        codec_for(annotation).dump(value)

    assert caught.value.path == path


@dataclasses.dataclass
class Line:
    order_id: int


@dataclasses.dataclass
class Order:
    lines: list[Line]


@pytest.mark.parametrize("wrong", ["seven", "7"])
def test_what_was_not_checked_when_it_was_made_is_refused_with_its_path(wrong: Any) -> None:
    """A dataclass takes anything; the way to it is told, also for what could be converted."""
    with pytest.raises(ParamsError) as caught:
        codec_for(Order).dump(Order([Line(1), Line(wrong)]))

    assert "params.lines[1].order_id" == caught.value.path
    assert wrong not in str(caught.value)


def test_stored_params_that_do_not_fit_are_refused_at_load() -> None:
    """A row written by hand may hold anything; the handler must not receive it."""
    with pytest.raises(ParamsError) as caught:
        codec_for(Welcome).load({"usr_id": "x"})

    assert caught.value.path == "params.usr_id"


def test_params_that_would_lose_something_are_refused() -> None:
    """A field that is written under one name and read under another would come back empty."""

    class Leaky(pydantic.BaseModel):
        note: str = pydantic.Field(default="", validation_alias="remark")

    codec = codec_for(Leaky)

    assert codec.dump({}) == {"note": ""}
    with pytest.raises(ParamsError, match="Leaky would not come back from JSON as it is"):
        codec.dump({"remark": "important"})


def test_aliases_travel() -> None:
    """A model with an alias is stored and read under the alias."""

    class Aliased(pydantic.BaseModel):
        usr_id: int = pydantic.Field(alias="usrId")

    codec = codec_for(Aliased)
    raw = codec.dump(Aliased(usrId=1))

    assert raw == {"usrId": 1}
    assert codec.load(raw) == Aliased(usrId=1)


def test_strict_models_read_their_own_json() -> None:
    """A strict model takes a UUID from JSON text, as JSON has no other."""

    class Strict(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(strict=True)
        usr_id: uuid.UUID

    codec = codec_for(Strict)

    assert codec.load(codec.dump(Strict(usr_id=uuid.UUID(int=1)))).usr_id == uuid.UUID(int=1)


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (int, "int becomes a JSON integer, not an object"),
        (list[Address], "becomes a JSON array, not an object"),
        (Address | None, "becomes a JSON null, not an object"),
        (Secret, "Secret has secret fields"),
        (type("Odd", (), {}), "Unable to generate pydantic-core schema"),
    ],
)
def test_types_that_cannot_be_params_are_refused_at_registration(annotation, message: str) -> None:
    """The mistake shows when the module is imported, not when the first task comes."""
    with pytest.raises(HandlerError, match=message):
        codec_for(annotation)


def test_hstore_keeps_text_and_none_only() -> None:
    """Plain params for an HSTORE column must equal what comes back."""
    assert snapshot_hstore({"a": "x", "b": None}) == {"a": "x", "b": None}
    with pytest.raises(ParamsError, match=r"params.a: hstore keeps text or None, got int"):
        snapshot_hstore({"a": 1})


def test_typed_params_fit_hstore_when_they_are_flat() -> None:
    """Scalars become text that the type reads back; nesting is refused."""
    codec = codec_for(Ordered)

    assert codec.load(hstore_texts(codec.dump({"usr_id": 3}))) == {"usr_id": 3}
    with pytest.raises(ParamsError, match=r"params.a: hstore cannot keep nested values"):
        hstore_texts({"a": []})
