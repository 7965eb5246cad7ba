// torch.autocast for the device.
#pragma once

namespace gaudi_sim {

void register_autocast();

}  // namespace gaudi_sim
