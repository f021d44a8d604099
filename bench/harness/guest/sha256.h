#pragma once
#include <stddef.h>
#include <stdint.h>

/* The digest as 64 hexadecimal digits and a zero. The length must be a multiple of 64. */
void sha256_hex(const uint8_t *message, size_t length, char hex[65]);
