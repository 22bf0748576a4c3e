#!/bin/sh
# Restart the containers of the named services one by one, each when the one before it is ready:
#
#   deploy/compose/rolling_restart.sh kvmanager engine gateway
#
# With two engines, and two gateways whose clients know both, no request fails.
set -eu

compose="docker compose"
$compose version >/dev/null 2>&1 || compose=docker-compose
READY_SECONDS=${READY_SECONDS:-1800}
# Gateways look up engines every 5 s; the next restart waits until they have found this one.
FOUND_SECONDS=${FOUND_SECONDS:-8}

for service in "$@"; do
    stop_seconds=60
    case $service in
    gateway) port=50051 name=quire.v1.Gateway ;;
    engine | engine-*) port=50052 name=quire.v1.Engine ;;
    # It would wait for its engines to detach; they report their blocks to the next one instead.
    kvmanager) port=50053 name=quire.v1.KVManager stop_seconds=5 ;;
    *) echo "$service is none of kvmanager, engine, engine-gpu, gateway" >&2 && exit 2 ;;
    esac
    for container in $($compose ps --quiet "$service"); do
        docker restart --time "$stop_seconds" "$container" >/dev/null
        began=$(date +%s)
        until docker exec "$container" quire health "127.0.0.1:$port" --service "$name" >/dev/null 2>&1; do
            [ $(($(date +%s) - began)) -lt "$READY_SECONDS" ] || { echo "$service does not get ready" >&2 && exit 1; }
            sleep 1
        done
        sleep "$FOUND_SECONDS"
        echo "$service $container is back"
    done
done
