#!/bin/bash
# The image's health check: the exit status is 0 if the container's service is ready.
#
# The service is the command of process 1 (an init before it does no harm), or the first argument. Its metrics listener
# answers /ready; bash opens the connection itself, because a Python process for each check would cost a hundred times
# as much. A service without that listener is checked over gRPC, by `quire health`. A container that runs no service has
# nothing to check.
set -u

declare -A metrics=([engine]=127.0.0.1:9152 [gateway]=127.0.0.1:9151 [kvmanager]=127.0.0.1:9153 [serve]=127.0.0.1:9151)
declare -A listen=([engine]=127.0.0.1:50052 [gateway]=127.0.0.1:50051 [kvmanager]=127.0.0.1:50053 [serve]=127.0.0.1:50051)
declare -A names=([engine]=quire.v1.Engine [gateway]=quire.v1.Gateway [kvmanager]=quire.v1.KVManager [serve]=quire.v1.Gateway)
seconds=4

mapfile -d '' -t words <"${HEALTHCHECK_COMMAND_LINE:-/proc/1/cmdline}"

service=${1:-}
if [ -z "$service" ]; then
    for ((at = 1; at < ${#words[@]}; at++)); do
        case ${words[at - 1]} in
        quire | */quire | services.cli.main) service=${words[at]} && break ;;
        esac
    done
fi
[ -n "$service" ] && [ -n "${metrics[$service]:-}" ] || exit 0

# setting OPTION DEFAULT: the value of the command line, of the environment, or the default; sets $value.
setting() {
    local at variable=QUIRE_${service^^}_${1^^}
    value=${!variable-$2}
    for ((at = 0; at < ${#words[@]}; at++)); do
        case ${words[at]} in
        "--${1//_/-}") value=${words[at + 1]:-} ;;
        "--${1//_/-}="*) value=${words[at]#*=} ;;
        esac
    done
}

# reachable ADDRESS: sets $host and $port to the same address for a caller in this container.
reachable() {
    host=${1%:*} port=${1##*:}
    case $host in
    0.0.0.0 | '') host=127.0.0.1 ;;
    '[::]') host='[::1]' ;;
    esac
}

setting metrics_listen "${metrics[$service]}"
if [ -z "$value" ]; then
    setting listen "${listen[$service]}"
    case $value in
    unix:*) ;;
    *) reachable "$value" && value=$host:$port ;;
    esac
    exec quire health "$value" --service "${names[$service]}" --timeout "$seconds"
fi
reachable "$value"
bare=${host#[}
exec 3<>"/dev/tcp/${bare%]}/$port" || exit 1
printf 'GET /ready HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n' "$host" >&3
read -r -t "$seconds" _ status _ <&3 && [ "$status" = 200 ] && exit 0
echo "$service is not ready: ${status:-no answer}"
exit 1
