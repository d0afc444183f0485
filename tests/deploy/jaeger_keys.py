"""Which keys Jaeger v2 and the collector components built into it know, as far as ``config/jaeger.yaml`` uses them.

From their configuration types: Jaeger's ``cmd/jaeger/internal`` and ``cmd/internal/storageconfig``, the schemas of
opentelemetry-collector(-contrib). An unknown key stops Jaeger's start. ``"*"`` is any name, ``...`` any value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_POLICIES: dict[str, Any] = {
    "string_attribute": {"key", "values", "enabled_regex_matching", "cache_max_size", "invert_match"},
    "numeric_attribute": {"key", "min_value", "max_value", "invert_match"},
    "boolean_attribute": {"key", "value", "invert_match"},
    "rate_limiting": {"spans_per_second"},
    "latency": {"threshold_ms", "upper_threshold_ms"},
    "status_code": {"status_codes"},
    "probabilistic": {"hash_salt", "sampling_percentage"},
}
_POLICY: dict[str, Any] = {"name": ..., "type": ..., **_POLICIES}
_ENDPOINT = {"endpoint", "tls", "auth"}
KEYS: dict[str, Any] = {
    "service": {
        "extensions": ...,
        "pipelines": {"*": {"receivers", "processors", "exporters"}},
        "telemetry": {
            "resource": ...,
            "metrics": {"level": ..., "readers": {"pull": {"exporter": {"prometheus": {"host", "port"}}}}},
            "logs": {"level", "encoding"},
        },
    },
    "extensions": {
        "healthcheckv2": {"use_v2": ..., "http": {"endpoint", "status", "config"}, "grpc": {"endpoint"}},
        "jaeger_query": {"storage": {"traces", "traces_archive", "metrics"}, "base_path": ..., "ui": ...},
        "jaeger_storage": {
            "backends": {
                "*": {
                    "memory": {"max_traces"},
                    "badger": {
                        "ttl": {"spans"},
                        "directories": {"keys", "values"},
                        "ephemeral": ...,
                        "consistency": ...,
                        "maintenance_interval": ...,
                        "metrics_update_interval": ...,
                        "read_only": ...,
                    },
                }
            },
            "metric_backends": {
                "*": {
                    "prometheus": {
                        "endpoint", "connect_timeout", "tls", "auth", "token_file_path", "token_override_from_context",
                        "metric_namespace", "latency_unit", "normalize_calls", "normalize_duration",
                        "extra_query_parameters", "extra_dimensions",
                    }
                }
            },
        },
    },
    "receivers": {"otlp": {"protocols": {"grpc": _ENDPOINT, "http": {*_ENDPOINT, "cors"}}}},
    "connectors": {
        "spanmetrics": {
            "metrics_flush_interval": ...,
            "metrics_expiration": ...,
            "aggregation_cardinality_limit": ...,
            "namespace": ...,
            "dimensions": {"name", "default", "glob"},
            "exclude_dimensions": ...,
            "histogram": {"disable": ..., "unit": ..., "explicit": {"buckets"}, "exponential": {"max_size"}},
            "exemplars": {"enabled", "max_per_data_point"},
        }
    },
    "processors": {
        "memory_limiter": {
            "check_interval", "limit_mib", "spike_limit_mib", "limit_percentage", "spike_limit_percentage",
        },
        "batch": {"timeout", "send_batch_size", "send_batch_max_size", "metadata_keys", "metadata_cardinality_limit"},
        "tail_sampling": {
            "decision_wait": ...,
            "decision_wait_after_root_received": ...,
            "num_traces": ...,
            "expected_new_traces_per_sec": ...,
            "decision_cache": {"sampled_cache_size", "non_sampled_cache_size"},
            "sample_on_first_match": ...,
            "policies": {**_POLICY, "and": {"and_sub_policy": _POLICY}},
        },
    },
    "exporters": {
        "jaeger_storage_exporter": {"trace_storage", "queue", "retry_on_failure"},
        "prometheus": {*_ENDPOINT, "namespace", "const_labels", "send_timestamps", "metric_expiration"},
    },
}  # fmt: skip


def unknown(value: Any, known: Any = KEYS, path: str = "") -> Iterator[str]:
    """Paths of keys that nobody knows."""
    if known is ... or known is None:
        return
    if isinstance(value, list):
        for item in value:
            yield from unknown(item, known, f"{path}[]")
    elif isinstance(value, Mapping):
        allowed = dict.fromkeys(known, ...) if isinstance(known, set) else known
        for key, below in value.items():
            kind = key if key in allowed else "*"
            if kind not in allowed:
                yield f"{path}.{key}".lstrip(".")
            else:
                yield from unknown(below, allowed[kind], f"{path}.{key}")
    elif value is not None:
        yield f"{path} has a value, where keys belong".lstrip(".")
