// Walks Python's frames from the innermost one outwards, and remembers which code is a library's.

#include <Python.h>
#include <frameobject.h>  // PyFrame_GetBack, until Python 3.11

#include <mutex>
#include <unordered_map>
#include <vector>

#include "lines.h"

namespace gaudi_sim {
namespace {

enum class Owner : char { kUser, kPackage, kFramework };

std::vector<std::pair<std::string, Owner>> folders;

// Both are touched with the GIL held only. Code objects are kept alive, so that no address means two of them.
auto* owners = new std::unordered_map<PyCodeObject*, Owner>;
auto* numbers = new std::unordered_map<std::string, uint32_t>;
auto* texts = new std::vector<std::string>{"no line of Python"};
std::mutex texts_mutex;  // texts are read without the GIL

const char* file_of(PyCodeObject* code) {
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  if (name == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return name;
}

Owner owner_of(PyCodeObject* code) {
  const auto known = owners->find(code);
  if (known != owners->end()) {
    return known->second;
  }
  const std::string file = file_of(code);
  Owner owner = Owner::kUser;
  size_t longest = 0;
  for (const auto& [folder, its] : folders) {
    if (folder.size() > longest && file.compare(0, folder.size(), folder) == 0) {
      longest = folder.size();
      owner = its;
    }
  }
  if (file.empty() || (file[0] == '<' && file != "<stdin>" && file != "<string>")) {
    owner = Owner::kFramework;  // generated code: "<frozen ...>", "<eval_with_key>"
  }
  Py_INCREF(code);
  return owners->emplace(code, owner).first->second;
}

// A line found on the way out, and whose it is.
struct Found {
  std::string text;
  Owner owner = Owner::kFramework;
};

void look(PyFrameObject* innermost, Found& best) {
  PyFrameObject* frame = innermost;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Owner owner = owner_of(code);
    if (best.text.empty() || owner < best.owner) {
      best.text = std::string(file_of(code)) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      best.owner = owner;
    }
    Py_DECREF(code);
    PyFrameObject* back = owner == Owner::kUser ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
}

// The thread in which the program began, which waits while autograd's threads work: the last of the interpreter's list.
PyThreadState* main_thread() {
  PyThreadState* last = nullptr;
  for (auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); state != nullptr;
       state = PyThreadState_Next(state)) {
    last = state;
  }
  return last;
}

uint32_t number(const std::string& text) {
  const auto [place, added] = numbers->emplace(text, static_cast<uint32_t>(texts->size()));
  if (added) {
    const std::lock_guard<std::mutex> lock(texts_mutex);
    texts->push_back(text);
  }
  return place->second;
}

}  // namespace

uint32_t current_line() {
  if (!Py_IsInitialized()) {
    return 0;
  }
  const auto state = PyGILState_Ensure();
  Found best;
  auto* own = PyThreadState_Get();
  look(PyThreadState_GetFrame(own), best);
  if (best.owner != Owner::kUser) {
    auto* main = main_thread();
    if (main != own) {
      look(PyThreadState_GetFrame(main), best);
    }
  }
  const uint32_t line = best.text.empty() ? 0 : number(best.text);
  PyGILState_Release(state);
  return line;
}

std::string line_text(uint32_t line) {
  const std::lock_guard<std::mutex> lock(texts_mutex);
  return (*texts)[line];
}

void set_library_paths(std::vector<std::string> framework, std::vector<std::string> packages) {
  folders.clear();
  for (auto& folder : framework) {
    folders.emplace_back(std::move(folder), Owner::kFramework);
  }
  for (auto& folder : packages) {
    folders.emplace_back(std::move(folder), Owner::kPackage);
  }
}

}  // namespace gaudi_sim
