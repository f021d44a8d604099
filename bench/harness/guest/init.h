/* What the first process of a machine does before and after its work. */
#pragma once

/* Mounts what programs expect, runs `work` in a child (or a command that does nothing, if NULL) and switches the
 * machine off. */
_Noreturn void run_as_init(void (*work)(void));
