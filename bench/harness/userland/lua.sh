# Lua, by make with as many jobs as the first argument says; what was built computes something.
PATH=/usr/bin:/bin
export PATH
folder=/tmp/lua-$$
mkdir $folder && echo "#define DEB_HOST_MULTIARCH \"\"" > $folder/lua5.4-deb-multiarch.h || exit 1
make -s -j$1 -C $folder -f /bench/lua.mk || exit 1
$folder/lua -e 'local n = 0 for i = 1, 1000 do n = n + #tostring(i) end os.exit(n == 2893 and _VERSION == "Lua 5.4" and 42)'
code=$?
rm -rf $folder
exit $code
