// The line of Python that runs an operator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gaudi_sim {

// The line of the user's code that runs now; on a thread of autograd, the line that called backward.
// Takes the GIL: hold no lock of this library. 0 where there is none.
uint32_t current_line();

// "file:line" of what `current_line` returned.
std::string line_text(uint32_t line);

// Folders whose files are not the user's; those of `packages` are named where nothing else is on the stack. Of two
// folders that hold a file, the inner one counts.
void set_library_paths(std::vector<std::string> framework, std::vector<std::string> packages);

}  // namespace gaudi_sim
