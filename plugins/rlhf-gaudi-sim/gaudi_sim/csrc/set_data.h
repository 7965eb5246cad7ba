// `tensor.data = other` between host and device.
#pragma once

namespace gaudi_sim {

// Refuses it from now on.
void refuse_set_data();

}  // namespace gaudi_sim
