package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// Only internal/unixsocket binds sockets in the file system, so that there is
// no moment in which the umask decides who may connect. The monitor, which does
// not link net, binds its own with the same call before bind.
func TestUnixSocketsAreBoundInOnePlace(t *testing.T) {
	owners := []string{"internal/unixsocket/", "conmon/monitor/", "test/"}
	sources(t, func(path, text string) {
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || hasAnyPrefix(path, owners) {
			return
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && bindsUnix(call) {
				t.Errorf("%s binds a Unix socket: use internal/unixsocket", files.Position(call.Pos()))
			}
			return true
		})
	})
}

func hasAnyPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// bindsUnix reports whether a call makes a listener at a path, or binds a socket to one.
func bindsUnix(call *ast.CallExpr) bool {
	called, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	switch called.Sel.Name {
	case "ListenUnix", "ListenUnixgram":
		return true
	case "Listen", "ListenPacket", "Bind":
		for _, arg := range call.Args {
			if namesUnix(arg) {
				return true
			}
		}
	}
	return false
}

// namesUnix reports whether an argument is the name of a Unix network or an address in one.
func namesUnix(arg ast.Expr) (found bool) {
	ast.Inspect(arg, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			found = found || n.Kind == token.STRING && strings.HasPrefix(n.Value, `"unix`)
		case *ast.SelectorExpr:
			found = found || n.Sel.Name == "SockaddrUnix"
		}
		return true
	})
	return found
}
