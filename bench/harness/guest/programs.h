/* Scripts in the root directory of other programs. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Starts one there, with an argument or NULL; it ends when we do. */
pid_t start_program(const char *script, const char *argument, bool with_devices);

/* A row's operation: make of Lua, two jobs. */
const char *make_lua_on_two(uint64_t n);

/* What is wrong with how one ended; NULL if nothing is. */
const char *program_verdict(int status);
