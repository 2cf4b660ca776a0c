# The first process of a guest once it has its root: Ray, and then only to reap what ends.
. /run/alchemist/settings
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor  # whoever joins has a host's Python
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/run/alchemist/token
(umask 077; printf '%s' "$TOKEN" > "$RAY_AUTH_TOKEN_PATH")
ulimit -n 65536 2> /dev/null
ulimit -l unlimited 2> /dev/null

AGENT=8091

say() { echo "alchemist-guest: $*" > /dev/console; }

up() {
    common="--node-ip-address=$IP --num-cpus=$CPUS --object-store-memory=$STORE"
    common="$common --disable-usage-stats --log-color=false"
    # Given, the raylet does not wait for its agents to say them: 15 s and no more, which an
    # emulated guest needs for their imports alone.
    common="$common --dashboard-agent-listen-port=$AGENT --dashboard-agent-grpc-port=8092"
    common="$common --runtime-env-agent-port=8093 --metrics-export-port=8094"
    if [ "$ROLE" = head ]; then
        # shellcheck disable=SC2086
        ray start --head --port="$PORT" --include-dashboard=false $common
    else
        # shellcheck disable=SC2086
        ray start --address="$HEAD" $common
    fi
}

# But this one Ray 2.60 does not pass on: the raylet waits for a file of its agent's.
say_agent() {
    while sleep 1; do
        for raylet in $(grep -ls 'raylet/[r]aylet' /proc/[0-9]*/cmdline); do
            words=$(tr '\0' '\n' < "$raylet")
            id=$(echo "$words" | sed -n 's/^--node_id=//p')
            file=$(echo "$words" | sed -n 's/^--session_dir=//p')/dashboard_agent_listen_port_$id
            [ -n "$id" ] && [ ! -e "$file" ] && printf '%s' "$AGENT" > "$file"
        done
    done
}

say "its root is there; starting Ray"
# Ray's own patience is for hosts; a guest may be emulated, and its head not up yet.
export RAY_NUM_REDIS_GET_RETRIES=300 RAY_gcs_server_port_wait_time_s=300
export RAY_gcs_server_request_timeout_seconds=120
export RAY_agent_register_timeout_ms=600000 RAY_health_check_failure_threshold=60
export RAY_DASHBOARD_STARTUP_TIMEOUT_S=300
if [ "$ROLE" = node ]; then
    until /run/alchemist/busybox nc -w 2 "${HEAD%:*}" "$PORT" -e /bin/true 2> /dev/null; do
        sleep 1
    done
fi
say_agent &
helper=$!
tries=0
until up > /run/alchemist/ray.log 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -ge 20 ]; then
        tail -n 20 /run/alchemist/ray.log > /dev/console
        say "failed: Ray does not start"
        break
    fi
    say "Ray has not started yet: $(tail -n 3 /run/alchemist/ray.log | tr '\n' ' ')"
    grep -hE 'Check failed|imed out' /tmp/ray/session_latest/logs/raylet.err | head -n 3 > /dev/console
    ray stop --force > /dev/null 2>&1
    sleep 2
done
kill "$helper"
[ "$tries" -lt 20 ] && say "ready: Ray with $CPUS CPUs"
if command -v tini > /dev/null; then exec tini -- sleep infinity; fi
while :; do sleep 3600 & wait; done
