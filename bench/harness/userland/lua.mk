# Lua 5.4, unoptimized as while it is changed, without what Debian's changes add to its own makefile.
SOURCE := /src/lua/src
vpath %.c $(SOURCE)
CFLAGS := -std=gnu99 -O0 -DLUA_COMPAT_5_3 -DLUA_USE_POSIX -I$(SOURCE) -I.
UNUSED := luac.c ltests.c onelua.c
OBJECTS := $(patsubst %.c,%.o,$(filter-out $(UNUSED),$(notdir $(wildcard $(SOURCE)/*.c))))

lua: $(OBJECTS)
	gcc -o $@ $^ -lm
$(OBJECTS): %.o: %.c
	gcc $(CFLAGS) -c -o $@ $<
