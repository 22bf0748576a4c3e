#!/bin/sh
# Restart the containers of the named services one by one, each once the previous one is ready:
#
#   deploy/compose/rolling_restart.sh kvmanager engine gateway
#
# With two engines, and clients that use both of two gateways, no request fails.
set -eu

compose="docker compose"
$compose version >/dev/null 2>&1 || compose=docker-compose
READY_SECONDS=${READY_SECONDS:-1800}
STOP_SECONDS=60
# Gateways discover engines every 5 s; the next restart waits until they have found this one.
FOUND_SECONDS=${FOUND_SECONDS:-8}

for service in "$@"; do
    case $service in
    kvmanager | engine | engine-* | gateway) ;;
    *) echo "$service must be kvmanager, engine, engine-gpu or gateway" >&2 && exit 2 ;;
    esac
    for container in $($compose ps --quiet "$service"); do
        docker restart --time "$STOP_SECONDS" "$container" >/dev/null
        began=$(date +%s)
        until docker exec "$container" quire-healthcheck >/dev/null 2>&1; do
            [ $(($(date +%s) - began)) -lt "$READY_SECONDS" ] || { echo "$service is not ready after $READY_SECONDS s" >&2 && exit 1; }
            sleep 1
        done
        sleep "$FOUND_SECONDS"
        echo "$service $container is back"
    done
done
