package layout

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/crius-run/crius/"

// tags are the build tags of the product.
const tags = "containers_image_openpgp,exclude_graphdriver_btrfs,nri_no_wasm"

// root is the top of the repository, relative to this package.
var root = filepath.Join("..", "..")

// goPackage is the used part of go list's output.
type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Error      *struct{ Err string }
}

func goList(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-e", "-tags", tags, "-json=ImportPath,Standard,Imports,Error"}, args...)...)
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Error != nil {
			t.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		t.Fatal("go list lists nothing")
	}
	return all
}

// below reports whether the path is that of a package or below it.
func below(path, parent string) bool {
	return path == parent || strings.HasPrefix(path, parent+"/")
}
