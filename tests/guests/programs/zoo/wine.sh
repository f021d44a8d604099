# program: wine's loader
# does: says its version, and looks for a program that is not there
# needs: /usr/lib/wine/wine64
# version: /usr/lib/wine/wine64 --version
# memory: 1G
# seconds: 200
export WINEPREFIX=$PWD/prefix WINEDEBUG=-all HOME=$PWD
/usr/lib/wine/wine64 --version
timeout 150 /usr/lib/wine/wine64 cmd.exe /c 'echo inside & ver & exit 5' 2> /dev/null | tr -d '\r'
