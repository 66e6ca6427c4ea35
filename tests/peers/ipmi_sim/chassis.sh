#!/bin/sh
# ipmi_sim asks this script for the chassis: "get power" is always 1, and nothing here can be switched.
shift
case "$1" in
get)
    shift
    for what; do
        case "$what" in
        power) echo "power:1" ;;
        boot) echo "boot:default" ;;
        esac
    done
    ;;
check) exit 1 ;;
esac
exit 0
