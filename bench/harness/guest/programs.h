/* Scripts in the root directory of other programs. */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

/* Starts one there, with an argument or NULL; it ends when we do. */
pid_t start_program(const char *script, const char *argument, bool with_devices);

/* What is wrong with how one ended; NULL if nothing is. */
const char *program_verdict(int status);
