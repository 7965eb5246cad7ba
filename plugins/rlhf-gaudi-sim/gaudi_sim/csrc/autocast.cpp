// Mixed precision as on the CPU: matrix products and convolutions in the lower precision, what loses by it in float32.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

#include "autocast.h"

namespace gaudi_sim {
namespace {

using torch::jit::Stack;
constexpr auto kHPU = c10::DeviceType::HPU;

const std::set<std::string>& lower() {
  static const std::set<std::string> names{
      "aten::_addmm_activation", "aten::_convolution",     "aten::addbmm",           "aten::addmm",
      "aten::addmv",             "aten::baddbmm",          "aten::bmm",              "aten::conv1d",
      "aten::conv2d",            "aten::conv3d",           "aten::conv_tbc",         "aten::conv_transpose1d",
      "aten::conv_transpose2d",  "aten::conv_transpose3d", "aten::linalg_vecdot",    "aten::linear",
      "aten::matmul",            "aten::mm",               "aten::mv",               "aten::prelu",
      "aten::scaled_dot_product_attention"};
  return names;
}

// In float32 on the device beside what the CPU keeps in it.
const std::set<std::string>& float32() {
  static const std::set<std::string> names{
      "aten::softmax",    "aten::log_softmax", "aten::layer_norm", "aten::group_norm", "aten::rms_norm",
      "aten::batch_norm", "aten::logsumexp",   "aten::cumsum",     "aten::norm",       "aten::dist"};
  return names;
}

const std::set<std::string>& widest() {
  static const std::set<std::string> names{"aten::cat", "aten::stack", "aten::index_copy"};
  return names;
}

enum class Policy { kLower, kFloat32, kWidest };

template <class Visit>
void each_tensor(Stack& stack, size_t arguments, Visit visit) {
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor()) {
      value = c10::IValue(visit(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(visit(tensor));
      }
      value = c10::IValue(std::move(list));
    }
  }
}

template <Policy policy>
void autocast(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastHPU);
  const size_t arguments = op.schema().arguments().size();
  auto dtype = policy == Policy::kFloat32 ? at::kFloat : at::autocast::get_autocast_dtype(kHPU);
  if (policy == Policy::kWidest) {
    each_tensor(*stack, arguments, [&](const at::Tensor& tensor) {
      if (at::autocast::is_eligible(tensor, kHPU) && tensor.scalar_type() == at::kFloat) {
        dtype = at::kFloat;
      }
      return tensor;
    });
  }
  each_tensor(*stack, arguments, [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kHPU);
  });
  op.callBoxed(stack);
}

}  // namespace

void register_autocast() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  const auto add = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    handles->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::AutocastHPU, std::move(kernel), std::nullopt, nullptr, "gaudi_sim"));
  };
  handles->push_back(dispatcher.registerFallback(
      c10::DispatchKey::AutocastHPU, c10::KernelFunction::makeFallthrough(), "gaudi_sim"));
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    const bool out = name.overload_name.find("out") != std::string::npos;
    if (!op || out || name.overload_name.find("imname") != std::string::npos) {
      continue;
    }
    if (lower().count(name.name) != 0) {
      add(name, c10::KernelFunction::makeFromBoxedFunction<&autocast<Policy::kLower>>());
    } else if (widest().count(name.name) != 0) {
      add(name, c10::KernelFunction::makeFromBoxedFunction<&autocast<Policy::kWidest>>());
    } else if (float32().count(name.name) != 0 || op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
      add(name, c10::KernelFunction::makeFromBoxedFunction<&autocast<Policy::kFloat32>>());
    }
  }
}

}  // namespace gaudi_sim
