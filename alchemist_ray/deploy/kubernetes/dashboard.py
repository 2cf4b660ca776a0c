"""A Grafana dashboard for clusters with gangs, of metrics that Ray exports."""

from __future__ import annotations

from typing import Any

Map = dict[str, Any]
WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's grid is 24 wide
ONLY = 'namespace="$namespace"'
# Title, unit, and for each line its query and legend.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
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


def dashboard() -> Map:
    """Return the dashboard, as Grafana imports it."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0}
    space = {
        "name": "namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(ray_node_cpu_utilization, namespace)",
        "refresh": 1,
    }
    return {
        "title": "Alchemist on Ray",
        "uid": "alchemist-on-ray",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, space]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }
