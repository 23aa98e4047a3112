/* The state behind the NVML stand-in: lines "key=value" of the file named by RIG_NVML_STATE.
 *
 *   count=8                      fail.nvmlDeviceGetTemperature=3
 *   gpu3.temperature=91          gpu*.power_mw=650000
 *   gpu3.throttle=0x40           gpu3.pid=1234:2147483648,1235:1048576
 *
 * Keys of a GPU: name temperature power_mw energy_mj sm_clock_mhz sm_clock_max_mhz mem_clock_mhz
 * throttle utilization memory_utilization memory_total memory_used persistence pid lost.
 * A line for one GPU wins over a line for gpu*. The file is read again when it has changed. */
#ifndef RIG_NVML_STATE_H
#define RIG_NVML_STATE_H

#include <stdbool.h>

#include "rigtopo.h"

void stateRefresh(void);
int stateCount(void);
int stateFailure(const char *function);
/* The value's text, or NULL. */
const char *stateText(int gpu, const char *key);
unsigned long long stateNumber(int gpu, const char *key, unsigned long long fallback);

#endif
