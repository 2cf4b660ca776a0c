"""A Grafana dashboard for clusters with gangs: metrics of Alchemist and of Ray."""

from __future__ import annotations

import json
from typing import Any

Map = dict[str, Any]
WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's grid is 24 wide
ONLY = 'namespace="$namespace"'
# Title, unit, and for each line its query and legend.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Gangs by state",
        "short",
        ((f"sum(ray_alchemist_gangs{{{ONLY}}}) by (state)", "{{state}}"),),
    ),
    (
        "MPI ranks, by gang",
        "short",
        ((f"sum(ray_alchemist_ranks{{{ONLY}}}) by (gang)", "{{gang}}"),),
    ),
    (
        "Memory of matrices, by gang",
        "bytes",
        ((f"sum(ray_alchemist_held_bytes{{{ONLY}}}) by (gang)", "{{gang}}"),),
    ),
    (
        "Memory for further matrices, by node",
        "bytes",
        ((f"max(ray_alchemist_free_bytes{{{ONLY}}}) by (node)", "{{node}}"),),
    ),
    (
        "Calls per second, by library and outcome",
        "ops",
        (
            (
                f"sum(rate(ray_alchemist_calls_total{{{ONLY}}}[1m])) by (library, outcome)",
                "{{library}} {{outcome}}",
            ),
        ),
    ),
    (
        "Time of calls: 95th percentile, by library",
        "s",
        (
            (
                "histogram_quantile(0.95, sum(rate("
                f"ray_alchemist_call_seconds_bucket{{{ONLY}}}[5m])) by (le, library))",
                "{{library}}",
            ),
        ),
    ),
    (
        "Commands that wait, and attached processes",
        "short",
        (
            (f"sum(ray_alchemist_queued_calls{{{ONLY}}}) by (gang)", "{{gang}} waiting"),
            (f"sum(ray_alchemist_processes{{{ONLY}}}) by (gang)", "{{gang}} attached"),
        ),
    ),
    (
        "Time in the queue: 95th percentile, by gang",
        "s",
        (
            (
                "histogram_quantile(0.95, sum(rate("
                f"ray_alchemist_queue_seconds_bucket{{{ONLY}}}[5m])) by (le, gang))",
                "{{gang}}",
            ),
        ),
    ),
    (
        "Transfers, by direction and route",
        "Bps",
        (
            (
                f"sum(rate(ray_alchemist_transferred_bytes_total{{{ONLY}}}[1m])) "
                "by (direction, route)",
                "{{direction}}, {{route}}",
            ),
        ),
    ),
    (
        "Gateways: sessions, and refusals per hour",
        "short",
        (
            (f"sum(ray_alchemist_gateway_sessions{{{ONLY}}}) by (user)", "{{user}}"),
            (
                f"sum(increase(ray_alchemist_gateway_refusals_total{{{ONLY}}}[1h])) by (of, cause)",
                "refused: {{of}}, {{cause}}",
            ),
        ),
    ),
    (
        "Gateways: bytes per second",
        "Bps",
        (
            (
                f"sum(rate(ray_alchemist_gateway_bytes_total{{{ONLY}}}[5m])) by (direction)",
                "{{direction}}",
            ),
        ),
    ),
    (
        "Lost ranks by cause, and recoveries, per hour",
        "short",
        (
            (
                f"sum(increase(ray_alchemist_failures_total{{{ONLY}}}[1h])) by (cause)",
                "{{cause}}",
            ),
            (
                f"sum(increase(ray_alchemist_recoveries_total{{{ONLY}}}[1h])) by (outcome)",
                "recovered: {{outcome}}",
            ),
        ),
    ),
    (
        "Starts of gangs per hour, and their mean time",
        "short",
        (
            (
                f"sum(increase(ray_alchemist_starts_total{{{ONLY}}}[1h])) by (outcome)",
                "{{outcome}}",
            ),
            (
                f"sum(rate(ray_alchemist_start_time_seconds_total{{{ONLY}}}[1h])) / "
                f'sum(rate(ray_alchemist_starts_total{{{ONLY}, outcome="ok"}}[1h]))',
                "mean time in s",
            ),
        ),
    ),
    (
        "Simulations: steps per second, and restarts per hour",
        "short",
        (
            (
                f"sum(rate(ray_alchemist_env_steps_total{{{ONLY}}}[1m])) by (simulator)",
                "{{simulator}}",
            ),
            (
                f"sum(increase(ray_alchemist_env_gang_restarts_total{{{ONLY}}}[1h])) "
                "by (simulator)",
                "{{simulator}} restarts",
            ),
        ),
    ),
    (
        "Gangs: reservations by state (PENDING: waiting for CPUs)",
        "short",
        ((f"sum(ray_placement_groups{{{ONLY}}}) by (State)", "{{State}}"),),
    ),
    (
        "Group managers, agents and drivers",
        "short",
        (
            (
                f'sum(ray_actors{{State!="DEAD",Source="executor",Name=~"GroupManager|Agent|Driver",'
                f"{ONLY}}}) by (Name)",
                "{{Name}}",
            ),
        ),
    ),
    (
        "CPUs reserved in Ray",
        "short",
        (
            (f'sum(ray_resources{{Name="CPU",State="USED",{ONLY}}}) by (pod)', "{{pod}}"),
            (f'sum(ray_resources{{Name="CPU",{ONLY}}})', "total"),
        ),
    ),
    (
        "CPU in use, by pod",
        "percent",
        ((f"ray_node_cpu_utilization{{{ONLY}}}", "{{pod}}"),),
    ),
    (
        "Memory in use, by pod (ranks, object store and tasks)",
        "bytes",
        (
            (f"ray_node_mem_used{{{ONLY}}}", "{{pod}}"),
            (f"min(ray_node_mem_total{{{ONLY}}})", "limit of the smallest pod"),
        ),
    ),
    (
        "Object store",
        "bytes",
        ((f"sum(ray_object_store_memory{{{ONLY}}}) by (Location)", "{{Location}}"),),
    ),
    (
        "Network: sent by pod (MPI between pods, matrices to other nodes)",
        "Bps",
        ((f"ray_node_network_send_speed{{{ONLY}}}", "{{pod}}"),),
    ),
    (
        "Network: received by pod",
        "Bps",
        ((f"ray_node_network_receive_speed{{{ONLY}}}", "{{pod}}"),),
    ),
    (
        "Autoscaler: active and pending pods",
        "short",
        (
            (f"sum(autoscaler_active_nodes{{{ONLY}}}) by (NodeType)", "{{NodeType}}"),
            (f"sum(autoscaler_pending_nodes{{{ONLY}}}) by (NodeType)", "{{NodeType}} pending"),
        ),
    ),
    (
        "Ray workers evicted for lack of memory, or lost",
        "short",
        (
            (f"sum(ray_memory_manager_worker_eviction_total{{{ONLY}}})", "evicted"),
            (f"sum(ray_node_manager_unexpected_worker_failure_total{{{ONLY}}})", "lost"),
        ),
    ),
)


def _panel(number: int, title: str, unit: str, lines: tuple[tuple[str, str], ...]) -> Map:
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(lines)
        ],
    }


def dashboard_text() -> str:
    """Return the dashboard, as Grafana imports it."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0}
    space = {
        "name": "namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(ray_node_cpu_utilization, namespace)",
        "refresh": 1,
    }
    board = {
        "title": "Alchemist on Ray",
        "uid": "alchemist-on-ray",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, space]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }
    return json.dumps(board, indent=1) + "\n"
