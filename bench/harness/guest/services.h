/* Servers that are measured from the host. */
#pragma once

/* Starts one on a port of ours and waits until it can be reached. NULL, or what went wrong. */
const char *start_service(const char *name, unsigned port);

/* Ends the one that runs, if one does. */
void stop_service(void);
