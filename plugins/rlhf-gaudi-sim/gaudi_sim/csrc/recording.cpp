// A recording keeps CPU tensors over the device's memory: views are resolved when they are recorded, and the memory
// stays, whatever becomes of the tensors.

#include "recording.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <map>
#include <memory>
#include <vector>

#include "accounting.h"
#include "kernel.h"

namespace gaudi_sim {
namespace {

struct Recorded {
  const Kernel* kernel;
  Stack arguments;
  Stack results;
};

using Recording = std::vector<Recorded>;

std::unique_ptr<Recording> recording;
// Never destroyed: Python, which ends before, may know these tensors.
auto& recordings = *new std::map<int64_t, Recording>;
int64_t handles = 0;

// Puts a result where that of the recorded run is, unless the operator has written there.
void put(const at::Tensor& result, const at::Tensor& recorded) {
  if (result.defined() && !result.storage().is_alias_of(recorded.storage())) {
    recorded.copy_(result);
  }
}

void run_again(const Recorded& recorded) {
  Stack stack = recorded.arguments;
  recorded.kernel->run_on_host(stack);
  for (size_t i = 0; i < recorded.results.size(); ++i) {
    const auto& result = stack[stack.size() - recorded.results.size() + i];
    if (result.isTensor()) {
      put(result.toTensor(), recorded.results[i].toTensor());
    } else if (result.isTensorList()) {
      const auto list = result.toTensorVector();
      const auto recorded_list = recorded.results[i].toTensorVector();
      for (size_t j = 0; j < list.size(); ++j) {
        put(list[j], recorded_list[j]);
      }
    }
  }
}

}  // namespace

void capture_begin() {
  TORCH_CHECK(recording == nullptr, "a recording has begun already; end it first");
  end_graph("before recording");
  recording = std::make_unique<Recording>();
}

int64_t capture_end() {
  TORCH_CHECK(recording != nullptr, "no recording has begun");
  recordings[++handles] = std::move(*recording);
  recording.reset();
  end_graph("recording");
  return handles;
}

void replay(int64_t handle) {
  const auto found = recordings.find(handle);
  TORCH_CHECK(found != recordings.end(), "there is no recording ", handle);
  TORCH_CHECK(recording == nullptr, "recordings cannot be replayed inside a recording");
  replayed(static_cast<int64_t>(found->second.size()));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& recorded : found->second) {
    run_again(recorded);
  }
}

void free_recording(int64_t handle) {
  recordings.erase(handle);
}

bool is_recording() {
  return recording != nullptr;
}

void record(const Kernel& kernel, Stack arguments, Stack results) {
  recording->push_back({&kernel, std::move(arguments), std::move(results)});
}

}  // namespace gaudi_sim
