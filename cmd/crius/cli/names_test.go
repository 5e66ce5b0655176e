package cli

import (
	"slices"
	"testing"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/test/kit/criserver"
)

func TestCompleteContainer(t *testing.T) {
	socket := criserver.Serve(t, criserver.OnePod{}, nil)
	for _, c := range []struct {
		socket string
		args   []string
		want   []string
	}{
		{socket, nil, []string{"default/web"}},
		{socket, []string{"web"}, []string{"main"}},
		{socket, []string{"default/web"}, []string{"main"}},
		{socket, []string{"other"}, nil},
		{socket, []string{"web", "main"}, nil},
		{"/nonexistent", nil, nil},
	} {
		cmd := new(cobra.Command)
		cmd.SetContext(t.Context())
		got, directive := CompleteContainer(func(*cobra.Command) (*config.Loaded, error) {
			cfg := config.Default()
			cfg.API.Listen = c.socket
			return &config.Loaded{Config: cfg}, nil
		})(cmd, c.args, "")
		if !slices.Equal(got, c.want) || directive != cobra.ShellCompDirectiveNoFileComp {
			t.Errorf("%q: %q, %v, want %q", c.args, got, directive, c.want)
		}
	}
}
