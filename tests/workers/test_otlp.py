"""The bytes of spans, read with the published classes and held against what the SDK writes for the same span."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags, TraceState

from workers.otlp import Encoder
from workers.spans import Link, SpanContext, SpanData

WHO = {"service.name": "forebay-gateway", "service.instance.id": "a"}
KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}

texts = st.text(max_size=300)
ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
values = st.one_of(
    texts, st.booleans(), ints, floats, st.lists(texts, max_size=4), st.lists(ints, max_size=4), st.lists(floats)
)
attributes = st.dictionaries(st.text(min_size=1, max_size=40), values, max_size=12)
times = st.integers(1, 2**63)
contexts = st.builds(
    SpanContext,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    tracestate=st.sampled_from(["", "a=1", "vendor@x=t61,b=2"]),
    remote=st.booleans(),
)
plain = st.builds(
    SpanContext, trace_id=st.integers(1, 2**128 - 1), span_id=st.integers(1, 2**64 - 1), remote=st.booleans()
)
spans = st.builds(
    SpanData,
    name=texts,
    context=contexts,
    parent=st.none() | contexts,
    kind=st.sampled_from(sorted(KINDS)),
    start_ns=times,
    end_ns=times,
    attributes=attributes,
    events=st.lists(st.tuples(texts, times, attributes), max_size=3),
    links=st.lists(st.builds(Link, plain, attributes), max_size=3),
    error=st.booleans(),
)


def sdk_context(context: SpanContext) -> SdkContext:
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    return SdkContext(context.trace_id, context.span_id, context.remote, TraceFlags(1), state)


def sdk_span(data: SpanData) -> ReadableSpan:
    return ReadableSpan(
        data.name,
        sdk_context(data.context),
        sdk_context(data.parent) if data.parent is not None else None,
        Resource(WHO),
        data.attributes,
        [Event(name, told, at) for name, at, told in data.events],
        [SdkLink(sdk_context(link.context), dict(link.attributes)) for link in data.links],
        KINDS[data.kind],
        status=Status(StatusCode.ERROR if data.error else StatusCode.UNSET),
        start_time=data.start_ns,
        end_time=data.end_ns,
        instrumentation_scope=InstrumentationScope("forebay"),
    )


def read(encoder: Encoder, *data: SpanData) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    request.ParseFromString(encoder.request([encoder.span(one) for one in data]))
    return request


def one(**given: Any) -> Span:
    """One span with these fields, as a collector reads it."""
    data = SpanData("s", SpanContext(1, 2), start_ns=1, end_ns=2, **given)
    found: Span = read(Encoder(WHO), data).resource_spans[0].scope_spans[0].spans[0]
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(spans, min_size=1, max_size=3))
def test_a_collector_reads_what_the_sdk_would_have_sent(data: list[SpanData]) -> None:
    assert read(Encoder(WHO), *data) == encode_spans([sdk_span(one) for one in data])


def test_what_is_none_is_left_out_and_what_has_no_place_is_told_as_well_as_can_be() -> None:
    told = one(attributes={"none": None, "big": 2**70, "odd": "a\ud800b", "nan": math.nan})
    found = {attribute.key: attribute.value for attribute in told.attributes}
    assert found.keys() == {"big", "odd", "nan"}
    assert found["big"].string_value == str(2**70)
    assert found["odd"].string_value == "a?b"
    assert math.isnan(found["nan"].double_value)


def test_a_links_tracestate_is_sent() -> None:
    assert one(links=[Link(SpanContext(3, 4, tracestate="a=1"))]).links[0].trace_state == "a=1"


def test_long_texts_are_cut_where_the_operator_says() -> None:
    data = SpanData("name stays", SpanContext(1, 2), attributes={"a": "12345", "b": ["12345"], "c": 12345})
    span = read(Encoder(WHO, longest=3), data).resource_spans[0].scope_spans[0].spans[0]
    assert span.name == "name stays"
    assert [attribute.value.string_value for attribute in span.attributes] == ["123", "", ""]
    assert span.attributes[1].value.array_value.values[0].string_value == "123"
    assert span.attributes[2].value.int_value == 12345


@pytest.mark.parametrize("value", [b"bytes", {"a": 1}, object()], ids=["bytes", "mapping", "object"])
def test_a_value_of_another_type_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"forebay\.x: a value of type"):
        one(attributes={"forebay.x": value})


def test_names_are_forgotten_before_they_fill_the_memory() -> None:
    encoder = Encoder(WHO)
    for number in range(3000):
        encoder.span(SpanData("s", SpanContext(1, 2), attributes={f"key {number}": number}))
    assert len(encoder._keys) <= 1024
    span = read(encoder, SpanData("s", SpanContext(1, 2), attributes={"key 1": 1}))
    assert span.resource_spans[0].scope_spans[0].spans[0].attributes[0].key == "key 1"
