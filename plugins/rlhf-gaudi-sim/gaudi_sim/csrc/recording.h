// Recordings: operators that ran once, and can be run again on the same memory.
#pragma once

#include <cstdint>

#include "call.h"

namespace gaudi_sim {

struct Kernel;

void capture_begin();
int64_t capture_end();
void replay(int64_t handle);
void free_recording(int64_t handle);

bool is_recording();

// Adds an operator to the recording, with what it took and gave on the host.
void record(const Kernel& kernel, Stack arguments, Stack results);

}  // namespace gaudi_sim
