// Which operators the device has.
#pragma once

namespace gaudi_sim {

void register_operators();

}  // namespace gaudi_sim
