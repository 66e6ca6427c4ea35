#!/bin/sh
# ipmi_sim asks this script for the chassis. What is switched is a file beside it, `power` (1 or 0; not there: 1), and
# each order is a line in `orders`. There is no machine, unless a program `machine` beside it is one: it is told 1 or 0.
folder=${0%/*}
shift
case "$1" in
get)
    shift
    for what; do
        case "$what" in
        power) echo "power:$(cat "$folder/power" 2>/dev/null || echo 1)" ;;
        boot) echo "boot:default" ;;
        esac
    done
    ;;
set)
    echo "$2 $3" >>"$folder/orders"
    # Where there is a file `stuck`, orders are taken and nothing happens.
    [ "$2" = power ] && [ ! -e "$folder/stuck" ] && echo "$3" >"$folder/power"
    [ "$2" = power ] && [ -x "$folder/machine" ] && "$folder/machine" "$3"
    ;;
check) exit 1 ;;
esac
exit 0
