// Every operator that has a CPU kernel gets the device's kernel over it; the others come apart into these by PyTorch's
// own rules. A few are written out, because they make tensors or because the CPU has them under other names.

#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "accounting.h"
#include "device.h"
#include "kernel.h"
#include "lines.h"

namespace gaudi_sim {
namespace {

void check_wishes(
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check_index(device.value_or(kDevice));
  TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "the simulated Gaudi has dense tensors only");
  TORCH_CHECK(
      !is_strict() || dtype.value_or(at::kFloat) != at::kDouble,
      line_text(current_line()), ": a float64 tensor on the device, which a Gaudi has not; use float32");
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  check_wishes(dtype, layout, device, pin_memory);
  return at::Tensor(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      allocator(),
      c10::DispatchKeySet(c10::DispatchKey::HPU),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())),
      memory_format));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check_wishes(dtype, layout, device, pin_memory);
  return at::Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      allocator(),
      c10::DispatchKeySet(c10::DispatchKey::HPU),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()))));
}

// Which of the implementations of scaled_dot_product_attention: the one that is made of other operators.
int64_t attention_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

void record_stream(at::Tensor&, c10::Stream) {}

// _copy_from(self, dst, non_blocking) is copy_(dst, self, non_blocking) on the CPU.
void as_copy(Stack& stack) {
  std::swap(stack[stack.size() - 3], stack[stack.size() - 2]);
}

// The same, without non_blocking, after dst has taken self's shape.
void as_copy_and_resize(Stack& stack) {
  const auto& self = stack[stack.size() - 2].toTensor();
  stack[stack.size() - 1].toTensor().resize_(self.sizes());
  stack.emplace_back(false);
  as_copy(stack);
}

// convolution_backward takes the bias's shape after the weight.
void as_convolution_backward(Stack& stack) {
  const auto gradient = stack[stack.size() - 10].toTensor();
  stack.insert(stack.end() - 7, c10::IValue(std::vector<int64_t>{gradient.size(1)}));
}

void register_kernel(
    const c10::OperatorHandle& op,
    const c10::OperatorHandle& host,
    void (*arrange)(Stack&) = nullptr) {
  // Kept for the life of the process.
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  handles->push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(),
      c10::DispatchKey::HPU,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op, host, arrange)),
      std::nullopt,
      nullptr,
      "gaudi_sim"));
}

}  // namespace

void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto find = [&](const char* name, const char* overload = "") {
    return dispatcher.findSchemaOrThrow(name, overload);
  };
  register_kernel(find("aten::_copy_from"), find("aten::copy_"), &as_copy);
  register_kernel(find("aten::_copy_from_and_resize"), find("aten::copy_"), &as_copy_and_resize);
  register_kernel(find("aten::convolution_overrideable"), find("aten::convolution"), [](Stack&) {});
  register_kernel(
      find("aten::convolution_backward_overrideable"), find("aten::convolution_backward"), &as_convolution_backward);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    // Collectives are the process group's.
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::HPU) && name.name.rfind("c10d::", 0) != 0) {
      register_kernel(*op, *op);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_fused_sdp_choice", TORCH_FN(attention_choice));
  library.impl("record_stream", TORCH_FN(record_stream));
}

// copy_ passes these keys by and resolves them itself; clone would call itself for ever without this.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace gaudi_sim
