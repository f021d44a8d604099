/* What the first process of a machine does before and after its work. */
#pragma once

/* Mounts what programs expect, has a child work, and switches the machine off. */
_Noreturn void run_as_init(void (*work)(char **arguments), char **arguments);
